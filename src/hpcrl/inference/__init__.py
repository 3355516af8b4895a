"""One replica of the policy: a vLLM server, its supervisor, and the proxy that serves it and records every token."""
