"""The operations that components are built from. Each reads the node, changes it only where it differs, and says so.

All of them return whether something changed (in a plan: would change), so that a deploy can write
`if ops.file(...): ...`. They must be called from within a step.
"""
