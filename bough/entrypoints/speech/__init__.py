"""Transcripts of sounds: windows, Whisper's algorithm over them, and the forms that transcripts are written in.

in: samples and what a client wants. out: segments, texts. never: HTTP, torch.
"""
