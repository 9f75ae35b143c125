"""etcd: HTTP, its v3 API, the backend, and a private server for tests."""
