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
        // A timestamp on disk may have any value, so no value may cause a panic.
        time_text(at(i64::MAX, u32::MAX));
        time_text(at(i64::MIN, 0));
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
