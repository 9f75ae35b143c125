"""torch's rendezvous handler API over our own protocol: handlers, back ends of shared state, the registry."""
