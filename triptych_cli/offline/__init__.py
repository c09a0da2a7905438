"""The parts of `triptych_cli.llm.LLM`: inputs, parameters, results, transports.
Must not know the command line.
"""
