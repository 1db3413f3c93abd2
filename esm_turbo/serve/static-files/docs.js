// The endpoints of openapi.json, with their fields and an example to paste into a terminal.

const make = (tag, text = "", kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind });
const spec = await (await fetch("/openapi.json")).json();
document.getElementById("summary").textContent = `${spec.info.summary} Version ${spec.info.version}.`;

function schema(one) {
  return one?.$ref ? spec.components.schemas[one.$ref.split("/").at(-1)] : one;
}

function type(one) {
  if (!one) return "";
  if (one.anyOf) return one.anyOf.map(type).join(" or ");
  if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (one.const !== undefined) return JSON.stringify(one.const);
  if (one.type === "array") return `list of ${type(one.items)}`;
  return one.$ref ? one.$ref.split("/").at(-1) : one.type ?? "";
}

function fields(one) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const title of ["field", "type", "default", ""]) head.append(make("th", title));
  const body = table.createTBody();
  for (const [name, field] of Object.entries(one.properties ?? {})) {
    const row = body.insertRow();
    row.insertCell().append(make("code", name));
    row.insertCell().textContent = type(field);
    row.insertCell().textContent = one.required?.includes(name) ? "required" : JSON.stringify(field.default);
    row.insertCell().textContent = field.description ?? "";
  }
  return table;
}

function example(method, path, one) {
  const body = {};
  for (const [name, field] of Object.entries(one?.properties ?? {})) {
    if (field.examples && !(name === "positions")) [body[name]] = field.examples;
  }
  const data = one ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body)}'` : "";
  return make("pre", `curl${method === "get" || one ? "" : " -X POST"} ${location.origin}${path.replace("{id}", "ID")}${data}`);
}

const list = document.getElementById("endpoints");
list.replaceChildren();
for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, one] of Object.entries(methods)) {
    const box = make("div", "", "result");
    box.append(make("h2", `${method.toUpperCase()} ${path}`), make("p", one.summary));
    const request = schema(one.requestBody?.content["application/json"].schema);
    if (request) box.append(make("p", request.description, "muted"), fields(request));
    box.append(example(method, path, request));
    const answer = one.responses["200"]?.content?.["application/json"]?.schema;
    if (answer?.$ref) box.append(make("p", `Answer: ${type(answer)}`, "muted"), fields(schema(answer)));
    list.append(box);
  }
}
