"""Spans of a request, for OpenTelemetry.

Decides which entries of a story become which spans, and how these reach a collector. Refuses to
know how requests are served: whoever serves them hands over what happened, with its times.

Reading path: `interface` (what a server uses), `spans` (from a story to spans; pure), `otel` (the
only file that imports OpenTelemetry, and only when tracing is on).

Common changes: a new entry of a story becomes a span by a line of `spans.RULES`.
"""
