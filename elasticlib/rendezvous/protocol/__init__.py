"""
What nodes and their coordinator say to each other: messages, how they look on the wire, what is asked of a store.
Pure.
"""
