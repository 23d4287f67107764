//! Paths, modes and times as text.

use ubtrfs_format::item::Timespec;
use ubtrfs_fs::mode;

pub(crate) use ubtrfs_archive::walk::printable;

/// Formats a mode as `drwxr-xr-x`.
pub(crate) fn mode_text(bits: u32) -> String {
    let kind = match bits & mode::TYPE {
        mode::DIRECTORY => 'd',
        mode::SYMLINK => 'l',
        mode::CHAR => 'c',
        mode::BLOCK => 'b',
        mode::FIFO => 'p',
        mode::SOCKET => 's',
        mode::REGULAR => '-',
        _ => '?',
    };
    let mut text = String::from(kind);
    for (shift, special, set, unset) in [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')] {
        let bits_here = bits >> shift;
        text.push(if bits_here & 4 != 0 { 'r' } else { '-' });
        text.push(if bits_here & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & special != 0, bits_here & 1 != 0) {
            (true, true) => set,
            (true, false) => unset,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// Names the type of a file.
pub(crate) fn type_text(bits: u32) -> &'static str {
    match bits & mode::TYPE {
        mode::DIRECTORY => "directory",
        mode::SYMLINK => "symlink",
        mode::CHAR => "char_device",
        mode::BLOCK => "block_device",
        mode::FIFO => "fifo",
        mode::SOCKET => "socket",
        mode::REGULAR => "file",
        _ => "unknown",
    }
}

/// Formats a time as `2026-11-21 15:38:32.000000001`, in UTC.
pub(crate) fn time_text(time: Timespec) -> String {
    let (year, month, day) = civil(time.sec.div_euclid(DAY));
    let secs = time.sec.rem_euclid(DAY);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{:09}", time.nsec)
}

/// Formats a time as `2026-11-21 15:38`, in UTC.
pub(crate) fn short_time_text(time: Timespec) -> String {
    let mut text = time_text(time);
    text.truncate(text.len().saturating_sub("32.000000001".len() + 1));
    text
}

/// Parses a time: `2026-11-21 15:38:32.5`, in UTC or with a zone such as `+01:00` at its end; a date alone; `@SECONDS`
/// since 1970; `now`. Accepts what [`time_text`] prints.
pub(crate) fn parse_time(text: &str) -> Result<Timespec, String> {
    let wrong = || {
        format!(
            "'{text}' is not a time; write for example '2026-11-21 15:38:32', with '+01:00' at its end for a zone \
             other than UTC, or @SECONDS"
        )
    };
    match text.strip_prefix('@') {
        _ if text == "now" => Some(Timespec::now()),
        Some(seconds) => parse_seconds(seconds),
        None => parse_date(text.trim()),
    }
    .ok_or_else(wrong)
}

/// Parses seconds with an optional sign and fraction.
fn parse_seconds(text: &str) -> Option<Timespec> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let (sec, nsec) = (number(whole)?.checked_mul(sign)?, nanoseconds(fraction)?);
    // The nanoseconds of a time count forward.
    match sign < 0 && nsec > 0 {
        true => Some(Timespec { sec: sec.checked_sub(1)?, nsec: 1_000_000_000 - nsec }),
        false => Some(Timespec { sec, nsec }),
    }
}

fn parse_date(text: &str) -> Option<Timespec> {
    let (date, rest) = match text.find(['T', ' ']) {
        Some(at) => (&text[..at], text[at + 1..].trim_start()),
        None => (text, ""),
    };
    let mut fields = date.splitn(3, '-').map(|field| number(field).filter(|_| field.len() >= 2));
    let (year, month, day) = (fields.next()??, fields.next()??, fields.next()??);
    let days = days_of(year, month, day);
    // A date that does not exist is another one when it is converted back.
    if !(0..=9999).contains(&year) || civil(days) != (year, month, day) {
        return None;
    }
    let (time, zone) = rest.split_at(rest.find(['+', '-', 'Z', 'U', ' ']).unwrap_or(rest.len()));
    let offset = zone_seconds(zone.trim())?;
    let (mut second, mut nsec) = (0, 0);
    if !time.is_empty() {
        let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
        nsec = nanoseconds(fraction)?;
        let mut fields = clock.split(':').map(|field| number(field).filter(|_| field.len() == 2));
        let (hour, minute) = (fields.next()??, fields.next()??);
        second = fields.next().unwrap_or(Some(0).filter(|_| fraction == "0"))?;
        if fields.next().is_some() || hour > 23 || minute > 59 || second > 59 {
            return None;
        }
        second += hour * 3600 + minute * 60;
    }
    Some(Timespec { sec: days * DAY + second - offset, nsec })
}

/// The seconds by which a zone is ahead of UTC.
fn zone_seconds(zone: &str) -> Option<i64> {
    let sign = match zone.bytes().next() {
        Some(b'+') => 1,
        Some(b'-') => -1,
        _ => return matches!(zone, "" | "Z" | "UTC").then_some(0),
    };
    let digits = zone[1..].replace(':', "");
    let (hours, minutes) = match digits.len() {
        2 => (number(&digits)?, 0),
        4 => (number(digits.get(..2)?)?, number(digits.get(2..)?)?),
        _ => return None,
    };
    (hours <= 24 && minutes <= 59).then_some(sign * (hours * 3600 + minutes * 60))
}

/// A number of ASCII digits.
fn number(text: &str) -> Option<i64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The nanoseconds of a fraction of a second. Further digits are ignored.
fn nanoseconds(fraction: &str) -> Option<u32> {
    let is_number = !fraction.is_empty() && fraction.bytes().all(|byte| byte.is_ascii_digit());
    format!("{fraction:0<9}").get(..9)?.parse().ok().filter(|_| is_number)
}

/// Converts a date to days since 1970, as [`civil`] converts them back. The year has at most four digits.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month_from_march = if month <= 2 { month + 9 } else { month - 3 };
    let day_of_year = (153 * month_from_march.clamp(0, 11) + 2) / 5 + day.clamp(1, 31) - 1;
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Formats seconds since 1970 as `Sat Nov 21 15:38:32 2026`, in UTC.
pub(crate) fn long_time_text(sec: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    let days = sec.div_euclid(DAY);
    let (year, month, day) = civil(days);
    let weekday = usize::try_from(days.rem_euclid(7)).map_or("", |index| DAYS[index]);
    format!("{weekday} {} {day:2} {} {year}", month_name(month), clock_text(sec))
}

/// Formats seconds since 1970 as `21.Nov 15:38:32`, in UTC.
pub(crate) fn day_time_text(sec: i64) -> String {
    let (_, month, day) = civil(sec.div_euclid(DAY));
    format!("{day:2}.{} {}", month_name(month), clock_text(sec))
}

fn month_name(month: i64) -> &'static str {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    usize::try_from(month - 1).map_or("", |index| MONTHS[index])
}

fn clock_text(sec: i64) -> String {
    let secs = sec.rem_euclid(DAY);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    format!("{hour:02}:{minute:02}:{second:02}")
}

/// Converts days since 1970 to year, month and day in the proleptic Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    // This computation lets years begin in March, so that the leap day is the last day of the year. An era has 400
    // years.
    let days = days.saturating_add(719_468);
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

const DAY: i64 = 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(sec: i64, nsec: u32) -> Timespec {
        Timespec { sec, nsec }
    }

    #[test]
    fn times_print_in_utc() {
        assert_eq!(time_text(at(0, 0)), "1970-01-01 00:00:00.000000000");
        assert_eq!(time_text(at(951_782_400, 5)), "2000-02-29 00:00:00.000000005");
        assert_eq!(time_text(at(1_795_275_512, 0)), "2026-11-21 15:38:32.000000000");
        assert_eq!(time_text(at(-1, 999_999_999)), "1969-12-31 23:59:59.999999999");
        assert_eq!(short_time_text(at(1_795_275_512, 0)), "2026-11-21 15:38");
        assert_eq!(long_time_text(1_795_275_512), "Sat Nov 21 15:38:32 2026");
        assert_eq!(long_time_text(0), "Thu Jan  1 00:00:00 1970");
        // A timestamp on disk may have any value, so no value may cause a panic.
        time_text(at(i64::MAX, u32::MAX));
        time_text(at(i64::MIN, 0));
    }

    #[test]
    fn times_are_read_as_they_are_printed() {
        let times = [at(0, 0), at(951_782_400, 5), at(1_795_275_512, 0), at(-1, 999_999_999), at(253_402_300_799, 1)];
        for time in times {
            assert_eq!(parse_time(&time_text(time)), Ok(time));
            assert_eq!(parse_time(&format!("{} UTC", time_text(time))), Ok(time));
        }
        for day in -719_528..2_932_897 {
            let (year, month, day_of_month) = civil(day);
            assert_eq!(days_of(year, month, day_of_month), day);
        }
    }

    #[test]
    fn times_have_zones_and_fractions() {
        for (text, time) in [
            ("1970-01-02", at(DAY, 0)),
            ("1970-01-01T00:01", at(60, 0)),
            ("1970-01-01 01:00:00+01:00", at(0, 0)),
            ("1970-01-01 00:00 -0230", at(9000, 0)),
            ("1970-01-01T00:00:00Z", at(0, 0)),
            ("@5", at(5, 0)),
            ("@-1.5", at(-2, 500_000_000)),
            ("@1.0000000019", at(1, 1)),
        ] {
            assert_eq!(parse_time(text), Ok(time), "{text}");
        }
        for text in [
            "",
            "@",
            "@x",
            "@1.",
            "@--1",
            "@99999999999999999999",
            "yesterday",
            "1970",
            "1970-13-01",
            "1970-02-30",
            "2026-00-10",
            "2026-11-21 24:00",
            "2026-11-21 10",
            "2026-11-21 10:00:60",
            "2026-11-21 10:00 CET",
            "2026-11-21 10:00+1",
            "10000-01-01",
            "2026-11-21 10:00.5",
            "2026-1-1\u{e4}",
        ] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn modes_print_as_ls_does() {
        assert_eq!(mode_text(0o040_755), "drwxr-xr-x");
        assert_eq!(mode_text(0o104_755), "-rwsr-xr-x");
        assert_eq!(mode_text(0o102_644), "-rw-r-Sr--");
        assert_eq!(mode_text(0o041_777), "drwxrwxrwt");
        assert_eq!(mode_text(0o120_777), "lrwxrwxrwx");
    }

    #[test]
    fn names_print_without_control_characters() {
        assert_eq!(printable(b"a\x1bb\xff\xc3\xa4"), "a\\u{1b}b\\xff\u{e4}");
    }
}
