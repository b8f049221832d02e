"""The journal for others: formats of events, and where they go. Back-ends, strangers to one another."""
