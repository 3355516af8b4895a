"""The quickstart's task set, tokenizer, policy and warm start; see README.md. Nothing of a run imports this package."""
