"""Measurements of hpcrl's own parts, run by ``hpcrl bench NAME``: each against a bound or a peer taken in the same run."""
