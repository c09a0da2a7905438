"""The parts of `launcher.llm.LLM`: inputs, parameters, results, transports.
Must not know the command line.
"""
