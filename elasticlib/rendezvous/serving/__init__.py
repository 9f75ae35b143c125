"""
A server that hosts the stores and coordinators of jobs outside their nodes: requests, decisions, and its threads.
"""
