//! Small pieces of text: escaped names, flags, times, checksums.

use std::fmt::Write;

use crate::csum::CsumType;
use crate::item::Timespec;

/// Escapes a name or path as text: control and invisible characters as `\n` or `\u{202e}`, invalid UTF-8 as `\xff`, and a
/// backslash as `\\`, so different names have different texts. All other characters are unchanged.
pub fn escaped(bytes: &[u8]) -> String {
    escape(bytes, |c| c == '\\' || is_hidden(c))
}

/// As [`escaped`], but a backslash is unchanged: for lines that contain escaped names, and for dumps, which show names
/// as btrfs-progs does.
pub fn escaped_line(bytes: &[u8]) -> String {
    escape(bytes, is_hidden)
}

fn escape(bytes: &[u8], is_escaped: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_escaped(c) {
                // Writing to a string does not fail.
                let _ = write!(out, "{}", c.escape_default());
            } else {
                out.push(c);
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

/// Whether a terminal obeys a character instead of showing it, or shows nothing: control characters, format characters
/// such as U+202E, which reverses the text behind it, and separators of lines and paragraphs.
pub(super) fn is_hidden(c: char) -> bool {
    c.is_control() || (!c.is_ascii() && FORMAT_CHARS.iter().any(|(first, last)| (*first..=*last).contains(&c)))
}

/// The ranges of Unicode's categories Cf, Zl and Zp.
const FORMAT_CHARS: [(char, char); 21] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{600}', '\u{605}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{6dd}', '\u{6dd}'),
    ('\u{70f}', '\u{70f}'),
    ('\u{890}', '\u{891}'),
    ('\u{8e2}', '\u{8e2}'),
    ('\u{180e}', '\u{180e}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{2064}'),
    ('\u{2066}', '\u{206f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{fff9}', '\u{fffb}'),
    ('\u{110bd}', '\u{110bd}'),
    ('\u{110cd}', '\u{110cd}'),
    ('\u{13430}', '\u{1343f}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0001}', '\u{e0001}'),
    ('\u{e0020}', '\u{e007f}'),
];

/// The names of the set bits that are in `names`, joined by `|`, or `none` if there are no such bits.
pub(super) fn flags(bits: u64, names: &[(u64, &'static str)], none: &'static str) -> String {
    let set: Vec<&str> = names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    if set.is_empty() { none.to_owned() } else { set.join("|") }
}

/// `seconds.nanoseconds (YYYY-MM-DD hh:mm:ss)`, in UTC.
pub(super) fn time(at: &Timespec) -> String {
    let seconds = at.sec.cast_unsigned();
    let days = at.sec.div_euclid(86_400);
    let in_day = at.sec.rem_euclid(86_400);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let (year, month, day) = civil_date(days);
    format!("{seconds}.{} ({year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02})", at.nsec)
}

/// Converts days since 1970 to year, month and day in the proleptic Gregorian calendar. The calculation lets a year
/// start in March, so that the leap day is the last day of the year. 400 years have 146,097 days.
#[allow(clippy::arithmetic_side_effects, reason = "days are at most 2^63 / 86,400, far below the limits of i64")]
fn civil_date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

/// A checksum in hex, byte by byte.
pub(super) fn csum(raw: &[u8], csum_type: CsumType) -> String {
    format!("0x{}", crate::node::hex(raw.get(..csum_type.size()).unwrap_or(raw)))
}
