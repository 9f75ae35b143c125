"""etcd: HTTP, its v3 API, the back end, and a private server for tests."""
