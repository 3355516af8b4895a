"""What the roles agree on: identities, states, messages, the record, keys, the run directory, the coordinator's client."""
