// A tensor as code: how to read it elsewhere. Names become literals of each language, so that none can end one.

/**
 * Return code that reads a tensor, by kind. `path` is the path or the address of the file or of the model. `hasRange` says that the
 * tensor is at `position` of the file at `path`.
 */
export function codeFor({ name, path, position, nbytes, isUrl, hasRange }) {
  const python = literal(name);
  const lines = {
    "Python, torch": [
      `import ingot`,
      ``,
      `with ingot.safe_open(${literal(path)}, "pt") as file:`,
      `    tensor = file[${python}]`,
    ],
    "Python, numpy": [
      `import ingot`,
      ``,
      `with ingot.safe_open(${literal(path)}, "np") as file:`,
      `    array = file[${python}]`,
    ],
    Rust: [
      ...opened(path, isUrl),
      `let bytes = model.find(${literal(name, true)})?.read(&ReadOptions::default(), &Unwatched)?;`,
    ],
  };
  // Names that begin with a dash would be options. No argument of a command can hold a NUL.
  const words = [...([path, name].some((word) => word.startsWith("-")) ? ["--"] : []), quoted(path), quoted(name)];
  if (!name.includes("\0")) lines.Command = [`ingot cat ${words.join(" ")}`];
  const end = position + nbytes - 1;
  if (hasRange && /^https?:/.test(path)) lines.curl = [`curl -gL -r ${position}-${end} -o tensor.bin ${quoted(path)}`];
  if (hasRange && !isUrl) {
    lines.dd = [
      `dd iflag=skip_bytes,count_bytes bs=1M skip=${position} count=${nbytes} if=${quoted(path)} of=tensor.bin`,
    ];
  }
  return Object.entries(lines).map(([kind, text]) => [kind, text.join("\n")]);
}

/** Lines of Rust that open a file, a directory or an index, here or at an address. */
function opened(path, isUrl) {
  const [more, call, options] = isUrl
    ? ["RemoteOptions", "open_url", "&RemoteOptions::default(), &Limits::default(), &Unwatched"]
    : ["CheckpointOptions", "open", "&CheckpointOptions::default()"];
  const place = isUrl ? literal(path, true) : `${literal(path, true)}.as_ref()`;
  const limits = isUrl ? [`use ingot_format::Limits;`] : [];
  return [
    ...limits,
    `use ingot_io::{Checkpoint, ${more}, ReadOptions, Unwatched};`,
    ``,
    `let model = Checkpoint::${call}(${place}, ${options})?;`,
  ];
}

/** A literal of Python, or of Rust: everything but plain ASCII is escaped. */
function literal(text, isRust = false) {
  const escaped = Array.from(text, (character) => {
    if (character === '"' || character === "\\") return `\\${character}`;
    if (/[\x20-\x7e]/.test(character)) return character;
    const point = character.codePointAt(0).toString(16);
    return isRust
      ? `\\u{${point}}`
      : point.length > 4
      ? `\\U${point.padStart(8, "0")}`
      : `\\u${point.padStart(4, "0")}`;
  });
  return `"${escaped.join("")}"`;
}

/** A word of a shell. */
function quoted(text) {
  if (/^[\w@%+:,./-]+$/.test(text)) return text;
  if (/^[\x20-\x7e]*$/.test(text)) return `'${text.replaceAll("'", `'\\''`)}'`;
  const bytes = Array.from(
    new TextEncoder().encode(text),
    (byte) =>
      byte > 0x1f && byte < 0x7f && byte !== 0x27 && byte !== 0x5c
        ? String.fromCharCode(byte)
        : `\\x${byte.toString(16).padStart(2, "0")}`,
  );
  return `$'${bytes.join("")}'`;
}
