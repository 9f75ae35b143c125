"""Metadata is in setup.cfg; this file lets every build front end find it."""

from setuptools import setup

setup()
