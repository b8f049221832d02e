"""The SDK: the asynchronous client, and the blocking one that is generated from it."""
