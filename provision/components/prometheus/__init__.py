"""prometheus"""
