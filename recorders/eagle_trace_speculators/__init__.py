"""Train side: records speculators' own EAGLE-3 forward, all steps of it, on given prompts or on what a server
did.

`record.record` is the entry point; the rest is split by concern: what is fed (`documents`, `replay`,
`features`), the models (`load`, `params`), where the sites are (`hooks`), one forward of them (`forward`),
and how much of a difference is rounding (`floors`).
"""
