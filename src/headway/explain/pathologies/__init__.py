"""Pathologies of training that a trace can show, one file a subject: each looks at one rank and yields findings."""
