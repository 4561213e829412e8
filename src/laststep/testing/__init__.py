"""The test suite for third-party stores."""
