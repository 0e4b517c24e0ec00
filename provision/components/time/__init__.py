"""time"""
