// A tensor as code: how to read it elsewhere. Names become literals of each language, so that none can end one.

/** Texts by what they are for. `path` is that of the file, or of the model; without `range` nobody can ask by bytes. */
export function codeFor({ name, path, position, nbytes, isUrl, hasRange }) {
  const python = literal(name);
  const lines = {
    "Python, torch": [`import ingot`, ``, `with ingot.safe_open(${literal(path)}, "pt") as file:`, `    tensor = file[${python}]`],
    "Python, numpy": [`import ingot`, ``, `with ingot.safe_open(${literal(path)}, "np") as file:`, `    array = file[${python}]`],
    Rust: [`let bytes = std::fs::read(${literal(path, true)})?;`, `let tensors = ingot_format::SafeTensors::deserialize(&bytes)?;`, `let tensor = tensors.tensor(${literal(name, true)})?;`],
    Command: [`ingot cat ${quoted(path)} ${quoted(name)}`],
  };
  if (hasRange && isUrl) lines.curl = [`curl -L -r ${position}-${position + nbytes - 1} -o tensor.bin ${quoted(path)}`];
  if (hasRange && !isUrl) lines.dd = [`dd iflag=skip_bytes,count_bytes bs=1M skip=${position} count=${nbytes} if=${quoted(path)} of=tensor.bin`];
  return Object.entries(lines).map(([kind, text]) => [kind, text.join("\n")]);
}

/** A literal of Python, or of Rust: everything but plain ASCII is escaped. */
function literal(text, isRust = false) {
  const escaped = Array.from(text, (character) => {
    if (character === '"' || character === "\\") return `\\${character}`;
    if (/[\x20-\x7e]/.test(character)) return character;
    const point = character.codePointAt(0).toString(16);
    return isRust ? `\\u{${point}}` : point.length > 4 ? `\\U${point.padStart(8, "0")}` : `\\u${point.padStart(4, "0")}`;
  });
  return `"${escaped.join("")}"`;
}

/** A word of a shell. */
function quoted(text) {
  if (/^[\w@%+=:,./-]+$/.test(text)) return text;
  if (/^[\x20-\x7e]*$/.test(text)) return `'${text.replaceAll("'", `'\\''`)}'`;
  const bytes = Array.from(new TextEncoder().encode(text), (byte) =>
    byte > 0x1f && byte < 0x7f && byte !== 0x27 && byte !== 0x5c ? String.fromCharCode(byte) : `\\x${byte.toString(16).padStart(2, "0")}`);
  return `$'${bytes.join("")}'`;
}
