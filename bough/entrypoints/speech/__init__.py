"""Transcription of audio: windows, Whisper's algorithm, and output formats.

in: samples and a client's options. out: segments, texts. never: HTTP, torch.
"""
