"""The state of a run: providers, trees and the names of pieces. Knows nothing of files."""
