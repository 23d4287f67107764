//! `ubtrfs getfattr` and `ubtrfs setfattr`: extended attributes of files.
//!
//! Values are written as the programs getfattr and setfattr do: as a text in quotes, as `0x` and hexadecimal digits, or
//! as `0s` and base64.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};
use ubtrfs_format::print::{insert_name, json_line};
use ubtrfs_fs::{Attr, Caller, Fs, XattrFlags};

use super::operands::{Patterns, for_each_file};
use super::text::printable;
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, lookup};
use crate::common::{print_bytes, print_out};
use ubtrfs_archive::glob::matches;

/// Show extended attributes of files in an image
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Without options, the names of user attributes are shown. Values are shown as a text, or in base64 (0s) if they \
                        are none. PATH may have patterns."
)]
pub(crate) struct XattrGetArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Show the value of this attribute
    #[arg(short, long, value_name = "NAME")]
    name: Option<OsString>,
    /// Show the values of all attributes that -m chooses
    #[arg(short, long, conflicts_with = "name")]
    dump: bool,
    /// Choose attributes by a pattern with *, ? and [...]; - stands for all attributes
    #[arg(
        short = 'm',
        long = "match",
        value_name = "PATTERN",
        default_value = "user.*",
        allow_hyphen_values = true,
        conflicts_with = "name"
    )]
    pattern: OsString,
    /// Show values in this form
    #[arg(short, long, value_name = "FORM", value_enum)]
    encoding: Option<Encoding>,
    /// Write only the bytes of the values
    #[arg(long, conflicts_with = "encoding")]
    only_values: bool,
    /// Show attributes of symbolic links instead of their targets
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print JSON, one object a line
    #[arg(long, conflicts_with_all = ["only_values", "encoding"])]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// Set or remove an extended attribute of files in an image
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "VALUE is a text, a text in double quotes with escapes (\\\\, \\\", \\ooo), 0x and hexadecimal digits, or 0s and \
                        base64. PATH may have patterns."
)]
#[command(group(clap::ArgGroup::new("change").required(true).args(["name", "remove"])))]
pub(crate) struct XattrSetArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// The attribute to set, for example user.comment
    #[arg(short, long, value_name = "NAME")]
    name: Option<OsString>,
    /// Its value; empty by default
    #[arg(short, long, value_name = "VALUE", requires = "name", allow_hyphen_values = true)]
    value: Option<OsString>,
    /// The attribute to remove
    #[arg(short = 'x', long, value_name = "NAME")]
    remove: Option<OsString>,
    /// Change symbolic links instead of their targets
    #[arg(short = 'h', long)]
    no_dereference: bool,
    #[command(flatten)]
    image: ImageOptions,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

/// The name of an attribute, and its value if that is to be shown.
type Named = (Vec<u8>, Option<Vec<u8>>);

/// The form in which a value is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Encoding {
    Text,
    Hex,
    Base64,
}

pub(crate) fn run_get(args: XattrGetArgs) -> anyhow::Result<ExitCode> {
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Read, Patterns::Match, |fs, path| {
        let attr = lookup(fs, path, !args.no_dereference)?;
        let found = attributes(fs, &attr, &args).with_context(|| format!("cannot read the attributes of {path}"))?;
        show(path, &found, &args)
    }))
}

/// The attributes that the arguments choose.
fn attributes(fs: &Fs, attr: &Attr, args: &XattrGetArgs) -> anyhow::Result<Vec<Named>> {
    let value = |name: &[u8]| fs.getxattr(attr.id, name).with_context(|| printable(name));
    if let Some(name) = &args.name {
        let name = name.as_bytes();
        return Ok(vec![(name.to_vec(), Some(value(name)?))]);
    }
    let pattern = args.pattern.as_bytes();
    let mut names = fs.listxattr(attr.id)?;
    names.retain(|name| pattern == b"-" || matches(pattern, name));
    names.sort_unstable();
    let with_value = |name: Vec<u8>| {
        let value = (args.dump || args.only_values || args.json).then(|| value(&name)).transpose()?;
        Ok((name, value))
    };
    names.into_iter().map(with_value).collect()
}

fn show(path: &ImagePath, found: &[Named], args: &XattrGetArgs) -> anyhow::Result<()> {
    if args.only_values {
        return found.iter().filter_map(|(_, value)| value.as_ref()).try_for_each(|value| print_bytes(value));
    }
    if args.json {
        let entry = |(name, value): &Named| {
            let mut entry = json!({});
            insert_name(&mut entry, "name", name);
            value.iter().for_each(|value| insert_name(&mut entry, "value", value));
            entry
        };
        let mut object = json!({ "xattrs": found.iter().map(entry).collect::<Vec<Value>>() });
        insert_name(&mut object, "path", &path.path);
        return print_out(&format!("{}\n", json_line(&object)));
    }
    if found.is_empty() {
        return Ok(());
    }
    let mut text = format!("# file: {path}\n");
    for (name, value) in found {
        match value {
            Some(value) => writeln!(text, "{}={}", printable(name), encoded(value, args.encoding))?,
            None => writeln!(text, "{}", printable(name))?,
        }
    }
    print_out(&(text + "\n"))
}

pub(crate) fn run_set(args: XattrSetArgs) -> anyhow::Result<ExitCode> {
    let value = args.value.as_ref().map_or(Ok(Vec::new()), |value| {
        decoded(value.as_bytes()).with_context(|| format!("'{}' is not a value", printable(value.as_bytes())))
    })?;
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::Match, |fs, path| {
        let id = lookup(fs, path, !args.no_dereference)?.id;
        if let Some(name) = &args.name {
            let (name, none) = (name.as_bytes(), XattrFlags::empty());
            let done = fs.setxattr(id, name, &value, none, &Caller::ROOT);
            return done.with_context(|| format!("cannot set {} of {path}", printable(name)));
        }
        let name = args.remove.as_ref().map_or(&b""[..], |name| name.as_bytes());
        let done = fs.removexattr(id, name, &Caller::ROOT);
        done.with_context(|| format!("cannot remove {} of {path}", printable(name)))
    }))
}

/// Writes a value in a form: by default as a text, or in base64 if it is none.
fn encoded(value: &[u8], form: Option<Encoding>) -> String {
    let text = std::str::from_utf8(value).ok().filter(|text| printable(value) == text.replace('\\', "\\\\"));
    match (form, text) {
        (None, Some(text)) => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
        (Some(Encoding::Text), _) => {
            let byte = |byte: &u8| match byte {
                b'"' | b'\\' => format!("\\{}", char::from(*byte)),
                b' '..=b'~' => char::from(*byte).to_string(),
                other => format!("\\{other:03o}"),
            };
            format!("\"{}\"", value.iter().map(byte).collect::<String>())
        }
        (Some(Encoding::Hex), _) => value.iter().fold("0x".to_owned(), |text, byte| text + &format!("{byte:02x}")),
        (Some(Encoding::Base64), _) | (None, None) => format!("0s{}", to_base64(value)),
    }
}

/// Reads a value as setfattr does.
fn decoded(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    let decoded = match text {
        [b'0', b'x' | b'X', digits @ ..] => from_hex(digits).context("write two hexadecimal digits for each byte")?,
        [b'0', b's' | b'S', digits @ ..] => from_base64(digits).context("write base64 after 0s")?,
        [b'"', inner @ .., b'"'] => unescaped(inner)
            .context("in quotes, write \\\\, \\\" and \\ooo (octal) for backslashes, quotes and other bytes")?,
        plain => plain.to_vec(),
    };
    Ok(decoded)
}

fn unescaped(text: &[u8]) -> Option<Vec<u8>> {
    let mut value = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        rest = after;
        let byte = match (first, after) {
            (b'\\', [same @ (b'\\' | b'"'), after @ ..]) => {
                rest = after;
                *same
            }
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                rest = after;
                (a - b'0') << 6 | (b - b'0') << 3 | (c - b'0')
            }
            (b'\\' | b'"', _) => return None,
            (plain, _) => *plain,
        };
        value.push(byte);
    }
    Some(value)
}

fn from_hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        digits.iter().map(|digit| char::from(*digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = BASE64[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let nr_digits = text.len() - text.iter().rev().take(2).take_while(|byte| **byte == b'=').count();
    for group in text[..nr_digits].chunks(4) {
        let digits: Option<Vec<u32>> =
            group.iter().map(|digit| BASE64.iter().position(|of| of == digit)?.try_into().ok()).collect();
        let bits = digits?.iter().fold(0u32, |bits, digit| bits << 6 | digit) << (6 * (4 - group.len()));
        bytes.extend(bits.to_be_bytes().iter().skip(1).take(group.len() * 3 / 4));
    }
    Some(bytes)
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_value_is_read_back() {
        let all: Vec<u8> = (0..=255).collect();
        for len in [0, 1, 2, 3, 4, 5, 255, 256] {
            for form in [None, Some(Encoding::Text), Some(Encoding::Hex), Some(Encoding::Base64)] {
                let text = encoded(&all[..len], form);
                assert_eq!(decoded(text.as_bytes()).unwrap(), &all[..len], "{form:?} {text}");
            }
        }
    }

    #[test]
    fn texts_stay_readable() {
        assert_eq!(encoded("a \"b\" \\ \u{e4}".as_bytes(), None), "\"a \\\"b\\\" \\\\ \u{e4}\"");
        assert_eq!(encoded(b"", None), "\"\"");
        assert_eq!(encoded(b"a\n", None), "0sYQo=");
        assert_eq!(encoded(b"a\xff", Some(Encoding::Text)), "\"a\\377\"");
        assert_eq!(encoded(b"a\xff", Some(Encoding::Hex)), "0x61ff");
    }

    #[test]
    fn values_are_read_as_by_setfattr() {
        for (text, value) in [
            ("plain", &b"plain"[..]),
            ("\"", b"\""),
            ("0x00fF", b"\x00\xff"),
            ("0sYWI=", b"ab"),
            ("", b""),
            ("0", b"0"),
        ] {
            assert_eq!(decoded(text.as_bytes()).unwrap(), value, "{text}");
        }
        for wrong in ["0x1", "0xzz", "0sYWI", "0sYW=I", "0s====", "\"a\"b\"", "\"\\x\"", "\"\\400\""] {
            assert!(decoded(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
