"""Chat templates that tests render with: small ones, each with a habit of real models' templates."""

from functools import cache

from longarc.records.message import Message, Role
from longarc.tokens.jinja_template import ChatTemplate
from longarc.tokens.template_format import TemplateFormat
from longarc.tokens.tokenizer import Tokenizer
from token_samples import qwen_tokenizer, small_tokenizer

_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
"""
_CALLS = """
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}
"""

GROWING = (
    _TOOLS
    + """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
"""
    + _CALLS
    + """
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)
"""Every message stays as it was, reasoning included."""

FORGETTING = (
    _TOOLS
    + """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
"""
    + _CALLS
    + """
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
)
"""As Qwen3's: reasoning before the last question goes, and without thinking the prompt holds an empty block."""

MOVING = """
{%- for message in messages %}
{%- if loop.last %}{{ 'Tools: none. ' }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""Something stands before the last message, wherever that is."""

MARKED = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""Says itself which tokens the model speaks."""

ROLES = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>' + message.content }}
{%- elif message.role == 'system' %}{{ '<|system|>' + message.content }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}
{{- '<|assistant|><think>' + (message.reasoning_content or '') + '</think>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>' }}{% if not enable_thinking %}{{ '</think>' }}{% endif %}{% endif %}
"""
"""As GLM-5.2's: the next role's token ends a turn."""


@cache
def template_format(source: str, tokenizer: Tokenizer | None = None) -> TemplateFormat:
    """A template as a chat format, over Qwen's control tokens unless it says otherwise."""
    tokenizer = tokenizer or (small_tokenizer() if source == ROLES else qwen_tokenizer())
    template = ChatTemplate(
        source,
        control_tokens=tokenizer.special_tokens,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    )
    return TemplateFormat(tokenizer, template)


def wire(message: Message) -> dict[str, object]:
    """A message as transformers gives it to a template."""
    out: dict[str, object] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        out |= {"tool_call_id": message.tool_call_id, "name": ""}
    return out
