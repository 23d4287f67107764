//! The header `ubtrfs.h` is made of the files in `src/exports`: their items, and the comments of these.
//!
//! The program cbindgen is not used. Its licence, MPL-2.0, is none that the workspace allows, and the version of Debian
//! does not know the attribute `unsafe(no_mangle)`. The sources are formatted by rustfmt and use few types, so a scan of
//! their lines is enough. What it does not know is an error.
//!
//! - H1. Each function that the library exports is in the header, with the types of its arguments, and no other.
//! - H2. The structs of the header have the layout of those in Rust; a program in C compares them (`layout`).

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Set to write the header instead of comparing it.
const WRITE: &str = "UBTRFS_WRITE_HEADER";

/// The sections, in their order.
const SECTIONS: &[&str] = &[
    "error",
    "device",
    "filesystem",
    "attributes",
    "names",
    "file",
    "directory",
    "subvolume",
    "job",
    "stream",
    "balance",
    "scrub",
    "members",
    "space",
    "quota",
    "extents",
    "check",
    "archive",
];

/// An item of a section.
#[derive(Debug)]
struct HeaderItem {
    /// The lines of its comment.
    comment: Vec<String>,
    /// The code until its end, in one line, without the body of a function.
    code: String,
    /// The lines of a struct.
    fields: Vec<(Vec<String>, String)>,
}

pub(crate) fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn section_path(name: &str) -> PathBuf {
    crate_dir().join("src/exports").join(format!("{name}.rs"))
}

/// The title of a section, and its items.
fn section(name: &str) -> (Vec<String>, Vec<HeaderItem>) {
    let text = fs::read_to_string(section_path(name)).unwrap();
    let title = text.lines().map_while(|line| line.strip_prefix("//!")).map(|line| line.trim().to_owned()).collect();
    let (mut items, mut comment, mut is_c) = (Vec::new(), Vec::new(), false);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(words) = line.strip_prefix("///") {
            comment.push(words.trim().to_owned());
        } else if line.starts_with("#[") {
            is_c |= line == "#[repr(C)]" || line == "#[unsafe(no_mangle)]";
        } else {
            let is_item = line.starts_with("pub const UBTRFS")
                || line.starts_with("pub enum Ubtrfs")
                || line.starts_with("pub type Ubtrfs")
                || is_c && (line.starts_with("pub struct ") || line.starts_with("pub extern \"C\" fn "));
            if is_item {
                items.push(item(std::mem::take(&mut comment), line, &mut lines));
            }
            assert!(is_item || !is_c, "{name}.rs: {line}: not understood");
            (comment, is_c) = (Vec::new(), false);
        }
    }
    (title, items)
}

fn item<'t>(comment: Vec<String>, first: &str, lines: &mut impl Iterator<Item = &'t str>) -> HeaderItem {
    if first.starts_with("pub struct") {
        let (mut fields, mut words) = (Vec::new(), Vec::new());
        for line in lines.by_ref().map(str::trim).take_while(|line| *line != "}") {
            match line.strip_prefix("///") {
                Some(text) => words.push(text.trim().to_owned()),
                None => fields.push((std::mem::take(&mut words), line.to_owned())),
            }
        }
        return HeaderItem { comment, code: first.to_owned(), fields };
    }
    let ends = |line: &str| line.ends_with([';', '{']) || line.ends_with("{}");
    let mut code = first.to_owned();
    while !ends(&code) {
        code.push(' ');
        code.push_str(lines.next().unwrap().trim());
    }
    HeaderItem { comment, code, fields: Vec::new() }
}

/// `UbtrfsOpenOptions` is `ubtrfs_open_options` in C.
fn c_name(name: &str) -> String {
    let mut made = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !made.is_empty() {
            made.push('_');
        }
        made.extend(letter.to_lowercase());
    }
    made
}

/// A declaration in C of a name with a type of Rust.
fn declaration(rust: &str, name: &str) -> String {
    if let Some((element, len)) = rust.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')?.split_once("; ")) {
        return declaration(element, &format!("{name}[{len}]"));
    }
    let (generic, inner) = match rust.split_once('<') {
        Some((generic, inner)) => (generic, inner.strip_suffix('>').unwrap()),
        None => (rust, ""),
    };
    let pointer = |inner: &str, mark: &str| {
        let made = declaration(inner, &format!("{mark}{name}"));
        // `char * *x` is written as `char **x`.
        made.replace("* *", "**").replace("* const", "*const")
    };
    let plain = match (generic, inner) {
        ("u8", _) => "uint8_t",
        ("u32", _) => "uint32_t",
        ("u64", _) => "uint64_t",
        ("i64", _) => "int64_t",
        ("usize", _) => "size_t",
        ("c_int", _) => "int",
        ("c_char", _) => "char",
        ("c_void", _) => "void",
        ("Text", _) => return format!("const char *{name}"),
        ("TextList", _) => return format!("const char *const *{name}"),
        ("NumberList", _) => return format!("const uint64_t *{name}"),
        ("Memory", _) => return format!("const void *{name}"),
        ("MemoryRoom" | "UserPointer", _) => return format!("void *{name}"),
        ("ErrorPlace", _) => return format!("ubtrfs_error **{name}"),
        ("Handle" | "OwnedAddress" | "ResultPlace", inner) => return pointer(inner, "*"),
        ("HandleList", inner) => return pointer(inner, "*const *"),
        ("Given" | "Address", inner) => return format!("const {}", pointer(inner, "*")),
        (other, "") if other.starts_with("Ubtrfs") => &c_name(other),
        (other, "") => match (other.strip_prefix("*const "), other.strip_prefix("*mut ")) {
            (Some(inner), _) => return format!("const {}", pointer(inner, "*")),
            (_, Some(inner)) => return pointer(inner, "*"),
            _ => panic!("the type {other} is not known"),
        },
        _ => panic!("the type {rust} is not known"),
    };
    format!("{plain} {name}").trim_end().to_owned()
}

/// The arguments of a function, such as `fs: Handle<UbtrfsFs>, path: Text`.
fn arguments(text: &str) -> String {
    let one = |argument: &str| {
        let (name, rust) = argument.trim().split_once(": ").unwrap();
        declaration(rust, name)
    };
    let list: Vec<String> = text.split(',').filter(|argument| !argument.trim().is_empty()).map(one).collect();
    if list.is_empty() { "void".to_owned() } else { list.join(", ") }
}

/// A function with its name, its arguments, and its result.
fn function(text: &str) -> (&str, &str, &str) {
    let (name, rest) = text.split_once('(').unwrap();
    let (arguments, rest) = rest.rsplit_once(')').unwrap();
    (name, arguments, rest.trim().strip_prefix("-> ").unwrap_or("c_void"))
}

fn comment(out: &mut String, indent: &str, lines: &[String]) {
    match lines {
        [] => {}
        [line] => writeln!(out, "{indent}/** {} */", line.replace('`', "")).unwrap(),
        lines => {
            writeln!(out, "{indent}/**").unwrap();
            for line in lines {
                writeln!(out, "{indent} * {}", line.replace('`', "")).unwrap();
            }
            writeln!(out, "{indent} */").unwrap();
        }
    }
}

/// The value of a field that is not set.
fn zero(rust: &str) -> &str {
    match rust {
        "u8" | "u32" | "u64" | "i64" | "usize" => "0",
        "UbtrfsTime" => "{0, 0, 0}",
        _ => "NULL",
    }
}

fn write_item(out: &mut String, item: &HeaderItem) {
    comment(out, "", &item.comment);
    let code = item.code.as_str();
    if let Some(rest) = code.strip_prefix("pub const ") {
        let number = |value: &str| value.trim_end_matches(';').replace('_', "");
        match (rest.split_once(": u32 = "), rest.split_once(": u64 = ")) {
            (Some((name, value)), _) => writeln!(out, "#define {name} {}u", number(value)).unwrap(),
            (_, Some((name, value))) => writeln!(out, "#define {name} UINT64_C({})", number(value)).unwrap(),
            _ => panic!("{code} is not understood"),
        }
    } else if let Some(rest) = code.strip_prefix("pub enum ") {
        let name = c_name(rest.strip_suffix(" {}").unwrap());
        writeln!(out, "typedef struct {name} {name};").unwrap();
    } else if let Some(rest) = code.strip_prefix("pub type ") {
        let (name, rest) = rest.split_once(" = ").unwrap();
        let text = rest.strip_prefix("Option<unsafe extern \"C\" fn").unwrap().strip_suffix(">;").unwrap();
        let (_, given, result) = function(text);
        let made = declaration(result, &format!("(*{})", c_name(name)));
        writeln!(out, "typedef {made}({});", arguments(given)).unwrap();
    } else if let Some(rest) = code.strip_prefix("pub struct ") {
        let name = c_name(rest.strip_suffix(" {").unwrap());
        writeln!(out, "typedef struct {name} {{").unwrap();
        let mut zeros = Vec::new();
        for (words, field) in &item.fields {
            let (field, rust) = field.trim_start_matches("pub ").trim_end_matches(',').split_once(": ").unwrap();
            comment(out, "  ", words);
            writeln!(out, "  {};", declaration(rust, field)).unwrap();
            zeros.push(if field == "struct_size" { format!("sizeof({name})") } else { zero(rust).to_owned() });
        }
        writeln!(out, "}} {name};").unwrap();
        if zeros[0].starts_with("sizeof") {
            writeln!(out, "#define {}_INIT {{{}}}", name.to_uppercase(), zeros.join(", ")).unwrap();
        }
    } else if let Some(rest) = code.strip_prefix("pub extern \"C\" fn ") {
        let (name, given, result) = function(rest.strip_suffix(" {").unwrap());
        writeln!(out, "{}({});", declaration(result, name), arguments(given)).unwrap();
    } else {
        panic!("{code} is not understood");
    }
    out.push('\n');
}

/// The header as the sources say it.
fn header() -> String {
    let mut out = fs::read_to_string(crate_dir().join("src/exports/header.txt")).unwrap();
    let mut listed = SECTIONS.to_vec();
    let mut opaque = String::new();
    let mut body = String::new();
    for name in SECTIONS {
        let (title, items) = section(name);
        body.push_str(
            "/* ---------------------------------------------------------------------------------------------\n",
        );
        for line in title {
            writeln!(body, " * {line}").unwrap();
        }
        body = body.replace(" * \n", " *\n");
        body.push_str(" */\n\n");
        for item in &items {
            write_item(if item.code.starts_with("pub enum ") { &mut opaque } else { &mut body }, item);
        }
    }
    out.push_str("/* ---------------------------------------------------------------------------------------------\n");
    out.push_str(" * Handles\n */\n\n");
    out.push_str(&opaque);
    out.push_str(&body);
    out.push_str("#ifdef __cplusplus\n}\n#endif\n\n#endif\n");
    listed.push("mod");
    for entry in fs::read_dir(crate_dir().join("src/exports")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert!(listed.contains(&stem.as_str()) || stem == "header", "{stem}.rs is no section");
    }
    out
}

/// The names of the functions in the sources.
pub(crate) fn functions_of_sources() -> Vec<String> {
    let items = SECTIONS.iter().flat_map(|name| section(name).1);
    let names = items.filter_map(|item| {
        let rest = item.code.strip_prefix("pub extern \"C\" fn ")?;
        Some(function(rest).0.to_owned())
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The names of the structs in C, and of their fields.
pub(crate) fn structs() -> Vec<(String, Vec<String>)> {
    let items = SECTIONS.iter().flat_map(|name| section(name).1);
    let made = items.filter_map(|item| {
        let name = c_name(item.code.strip_prefix("pub struct ")?.strip_suffix(" {")?);
        let field = |(_, field): &(_, String)| field.trim_start_matches("pub ").split_once(':').unwrap().0.to_owned();
        Some((name, item.fields.iter().map(field).collect()))
    });
    made.collect()
}

#[test]
fn the_header_is_made_of_the_sources() {
    let path = crate_dir().join("include/ubtrfs.h");
    let made = header();
    if std::env::var_os(WRITE).is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &made).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let differs = made.lines().zip(committed.lines()).find(|(made, committed)| made != committed);
    assert!(made == committed, "run the test with {WRITE}=1; the first difference: {differs:?}");
}

#[test]
fn types_of_rust_are_declared_in_c() {
    for (rust, c) in [
        ("ResultPlace<Handle<UbtrfsFs>>", "ubtrfs_fs **x"),
        ("ResultPlace<OwnedAddress<c_char>>", "char **x"),
        ("ResultPlace<Address<UbtrfsDirEntry>>", "const ubtrfs_dir_entry **x"),
        ("ResultPlace<UbtrfsMetadata>", "ubtrfs_metadata *x"),
        ("HandleList<UbtrfsDevice>", "ubtrfs_device *const *x"),
        ("Given<UbtrfsTimes>", "const ubtrfs_times *x"),
        ("ResultPlace<OwnedAddress<UbtrfsScrubReport>>", "ubtrfs_scrub_report **x"),
        ("Address<u64>", "const uint64_t *x"),
        ("NumberList", "const uint64_t *x"),
        ("*const UbtrfsProblem", "const ubtrfs_problem *x"),
        ("[u8; 16]", "uint8_t x[16]"),
        ("UbtrfsReadAtFn", "ubtrfs_read_at_fn x"),
        ("ErrorPlace", "ubtrfs_error **x"),
    ] {
        assert_eq!(declaration(rust, "x"), c);
    }
}
