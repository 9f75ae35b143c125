"""etcd: HTTP, its APIs v2 and v3, the back end, and a private server for tests."""
