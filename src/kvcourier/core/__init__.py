"""kvcourier."""
