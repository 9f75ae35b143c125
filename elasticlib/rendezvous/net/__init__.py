"""Endpoints and addresses: parsing, resolving, dialling, binding."""
