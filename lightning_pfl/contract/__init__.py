"""The interfaces between methods, engines and callbacks."""
