"""Names of the harnesses that come with LongArc; apart from their settings, so that help needs no pydantic."""

from typing import Final

HARNESSES: Final = {
    "claude-code": "longarc.envs.harnesses.claude_code:ClaudeCode",
    "codex": "longarc.envs.harnesses.codex:Codex",
    "opencode": "longarc.envs.harnesses.opencode:Opencode",
    "mini-swe-agent": "longarc.envs.harnesses.mini_swe_agent:MiniSweAgent",
    "openai-agents": "longarc.envs.harnesses.openai_agents:OpenAiAgents",
    "custom": "longarc.envs.harnesses.custom:Custom",
}
"""Import paths of the harnesses that come with LongArc, by name."""
