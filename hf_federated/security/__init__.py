"""
Encryption and authentication for split models, and the primitives of secure aggregation.

- `certificates`: a private certificate authority, and certificates for mutual TLS between clients and the server.
- `keys`: RSA identities of the parties, and their fingerprints.
- `handshake`: the key agreement between a client and the server, repeated for each key epoch.
- `encrypted_session`: sessions that encrypt and decrypt messages and rotate their keys, and the threat model.
- `authenticated_encryption`: AES-256-GCM for one direction of one key epoch.
- `encrypted_link`: a link to the server on which every message is encrypted.
- `peer_envelopes`: encrypted messages between clients, which the server forwards but cannot read.
- `masks`: key agreement, masks from keys, and sealed messages.
- `neighbors`: with which clients a client shares its masks, if there are many.
- `prime_field`: vectors over the field of 2^31 - 1, and coded masks.
- `shamir`: shares of a secret.

All modules except `neighbors` and `shamir` need `cryptography` (extra `network`). The modules are imported one by one;
the package exports no names.
"""
