"""What a run consists of: providers, trees and the names of pieces. Knows nothing of files."""
