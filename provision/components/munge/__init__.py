"""munge"""
