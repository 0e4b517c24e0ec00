"""firewall"""
