"""What an output may be, as text: constraints, and the form in which grammar engines take them.

Must not know tokens, requests or the wire: frontends check with it what engines compile.
"""
