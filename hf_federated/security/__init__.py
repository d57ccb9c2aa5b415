"""Keys, handshakes, sealed messages and certificates. Needs cryptography (extra `split`)."""
