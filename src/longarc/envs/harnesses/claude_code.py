"""Claude Code: Anthropic Messages, streamed; sub-agents are told by header, compactions by their prompt.

Its system prompt with all tools is some 80 KB. ``arguments`` of a recipe shorten it for models with a short context,
e.g. ``["--tools", "Bash", "--system-prompt", "You work in a shell."]``.
"""

from typing import Final

from longarc.envs.harnesses.program_harness import ProgramHarness
from longarc.envs.harnesses.running import MODEL, run_program
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "npm install --prefix .agents/claude-code @anthropic-ai/claude-code@2.1.197"
_QUIET: Final = {
    # Root is refused otherwise; the box is a sandbox.
    "IS_SANDBOX": "1",
    # No telemetry, updates or error reports: nothing answers them here.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # No first line of the system prompt that differs from run to run, so that rollouts share their prefix.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
    "DISABLE_COST_WARNINGS": "1",
    "USE_BUILTIN_RIPGREP": "1",
}


class ClaudeCode(ProgramHarness):
    """The ``claude`` program. ``claude --help`` lists its arguments."""

    name = "claude-code"
    install = INSTALL
    local = "node_modules/.bin/claude"
    on_path = "claude"

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        done = await run_program(
            sandbox,
            [
                *self._installed.argv,
                *("--print", "--output-format", "text", "--model", MODEL),
                *(
                    "--dangerously-skip-permissions",
                    "--strict-mcp-config",
                    "--no-session-persistence",
                ),
                *self._arguments,
            ],
            env={
                "ANTHROPIC_BASE_URL": policy.base_url,
                "ANTHROPIC_API_KEY": policy.key,
                **{
                    f"ANTHROPIC_DEFAULT_{size}_MODEL": MODEL for size in ("OPUS", "SONNET", "HAIKU")
                },
                "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
                "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(policy.max_new_tokens),
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(policy.max_context_tokens),
                **_QUIET,
            },
            stdin=prompt,
            timeout_s=timeout_s,
        )
        return HarnessResult(run=done)
