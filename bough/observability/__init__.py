"""What a running server reports about itself: log lines, its heartbeat, metrics and traces.

in: events and numbers. out: log lines, /metrics, spans, a shared heartbeat. never: request text, or decisions.
"""
