// Requests to the service that this page comes from.

export function withToken() {
  const token = document.getElementById("token").value.trim();
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// The message of an answer that is an error, with the field that is wrong.
function messageOf(status, body) {
  const items = Array.isArray(body?.detail) ? body.detail : [];
  if (status === 401) document.getElementById("access").open = true;
  if (!items.length) return `the service answered with status ${status}`;
  return items.map(({ loc, msg }) => {
    const [where, ...field] = loc;
    if (where !== "body" || !field.length) return msg;
    // Many messages begin with the field already, as in `candidates.1: `.
    const begin = `${field.join(".")}: `;
    return `${field.map(shown).join(" ")}: ${msg.startsWith(begin) ? msg.slice(begin.length) : msg}`;
  }).join("; ");
}

function shown(part) {
  return typeof part === "number" ? `number ${part + 1}` : part;
}

async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...withToken() };
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the service cannot be reached");
  }
  if (answer.ok) return answer;
  const again = answer.headers.get("Retry-After");
  const text = messageOf(answer.status, await answer.json().catch(() => null));
  throw new Error(again ? `${text} (in ${again} s)` : text);
}

export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// Reads lines of JSON as they arrive; returns the result, and reports progress from 0 to 1.
export async function stream(path, body, signal, report) {
  const answer = await send(path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const { progress, result, error } = JSON.parse(line);
      if (error) throw new Error(messageOf(0, error));
      if (result) return result;
      report(progress.done / progress.total);
    }
    if (done) throw new Error("the service ended before the result was complete");
  }
}
