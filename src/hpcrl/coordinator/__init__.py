"""The coordinator: a durable queue of rollouts between workers, scorers, inference replicas and the trainer."""
