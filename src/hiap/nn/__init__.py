"""Modules and nothing else: gates, and the plain blocks of a compact network. They need torch alone."""
