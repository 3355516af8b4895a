"""Publishing weights: manifest, plan, staging, transfer, and the plugin inside vLLM."""
