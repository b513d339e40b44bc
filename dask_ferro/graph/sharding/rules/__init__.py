"""Sharding rules of operators: the right ways of computing a node on equal shards."""
