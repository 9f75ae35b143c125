"""
Jobs that meet through a third party's rendezvous handler: what is expected of it, and what is agreed on through its
store.
"""
