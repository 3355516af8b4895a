#!/bin/bash
# An agent in bash, curl, sed and awk: one fenced bash block per turn, its output as the next user message. An example of a harness that
# knows nothing of hpcrl but OPENAI_BASE_URL, OPENAI_API_KEY, and $HPCRL_EXEC, which runs a command in the attempt's sandbox.
set -euo pipefail

escape() { # text → inside of a JSON string
    LC_ALL=C tr -d '\000-\010\013-\037' | sed 's/\\/\\\\/g; s/"/\\"/g; s/\t/\\t/g' | awk '{ printf "%s\\n", $0 }'
}

messages="{\"role\": \"user\", \"content\": \"$(escape < "$HPCRL_INSTRUCTION")\"}"
for ((turn = 0; turn < HPCRL_MAX_TURNS; turn++)); do
    body="{\"model\": \"$HPCRL_MODEL\", \"messages\": [$messages]}"
    if ! reply=$(curl -sS --fail-with-body -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
        --data-binary @- "$OPENAI_BASE_URL/chat/completions" <<< "$body"); then
        echo "$reply" >&2
        exit 1
    fi
    # The reply's text stays escaped: it goes back into the history as it came.
    text=$(sed -n 's/.*"message": *{"role": *"assistant", *"content": *"\(.*\)"}, *"finish_reason".*/\1/p' <<< "$reply")
    finish=$(sed -n 's/.*"finish_reason": *"\([a-z_]*\)".*/\1/p' <<< "$reply")
    [ "$finish" = stop ] || break
    command=$(printf '%b' "$(sed 's/\\"/"/g' <<< "$text")" | sed -n '/^```bash$/,/^```$/p' | sed '1d; $d')
    [ -n "$command" ] || break
    output=$("$HPCRL_EXEC" "$command") || true
    messages+=", {\"role\": \"assistant\", \"content\": \"$text\"}"
    messages+=", {\"role\": \"user\", \"content\": \"$(escape <<< "$output")\"}"
done
