//! Which snapshots a prune keeps. The rules are those of restic's `forget`: each rule looks at the snapshots from the
//! newest to the oldest, and keeps the newest one of each of the last N hours, days, weeks, months or years that have a
//! snapshot. Times are UTC.

use std::str::FromStr;

use chrono::{DateTime, Datelike, Months, Timelike, Utc};

/// The rules of a prune. A snapshot stays if any rule keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeepRules {
    /// The last N snapshots.
    pub last: u32,
    /// The newest snapshot of each of the last N hours that have one.
    pub hourly: u32,
    /// ... of each day.
    pub daily: u32,
    /// ... of each ISO week.
    pub weekly: u32,
    /// ... of each month.
    pub monthly: u32,
    /// ... of each year.
    pub yearly: u32,
    /// All snapshots that are at most this much older than the newest one.
    pub within: Option<KeepWithin>,
}

/// A length of time such as `1y6m10d12h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepWithin {
    years: u32,
    months: u32,
    days: u32,
    hours: u32,
}

impl FromStr for KeepWithin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a length of time; write years, months, days and hours: 1y6m10d12h");
        let mut within = Self::default();
        let mut rest = text;
        while !rest.is_empty() {
            let at = rest.find(|digit: char| !digit.is_ascii_digit()).ok_or_else(wrong)?;
            let number: u32 = rest[..at].parse().map_err(|_| wrong())?;
            let unit = rest[at..].chars().next().ok_or_else(wrong)?;
            let field = match unit {
                'y' => &mut within.years,
                'm' => &mut within.months,
                'd' => &mut within.days,
                'h' => &mut within.hours,
                _ => return Err(wrong()),
            };
            *field = number;
            rest = &rest[at + unit.len_utf8()..];
        }
        if within == Self::default() { Err(wrong()) } else { Ok(within) }
    }
}

impl KeepWithin {
    /// The time that is this much before another one; the earliest time if there is none.
    fn before(&self, time: DateTime<Utc>) -> DateTime<Utc> {
        let months = self.years.checked_mul(12).and_then(|months| months.checked_add(self.months));
        let hours = i64::from(self.days) * 24 + i64::from(self.hours);
        let earlier = months.and_then(|months| time.checked_sub_months(Months::new(months)));
        let earlier = earlier.and_then(|time| time.checked_sub_signed(chrono::TimeDelta::try_hours(hours)?));
        earlier.unwrap_or(DateTime::<Utc>::MIN_UTC)
    }
}

impl KeepRules {
    /// Whether no rule keeps anything.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The reasons to keep each snapshot of one subvolume. `times` are seconds since 1970, the newest first.
    pub(crate) fn reasons(&self, times: &[i64]) -> Vec<Vec<&'static str>> {
        let times: Vec<DateTime<Utc>> = times.iter().map(|sec| time_of(*sec)).collect();
        let mut reasons = vec![Vec::new(); times.len()];
        /// The period that holds a time.
        type PeriodOf = fn(&DateTime<Utc>) -> (i32, u32);
        let rules: [(u32, &str, PeriodOf); 5] = [
            (self.hourly, "hourly", |time| (time.year(), time.ordinal() * 24 + time.hour())),
            (self.daily, "daily", |time| (time.year(), time.ordinal())),
            (self.weekly, "weekly", |time| (time.iso_week().year(), time.iso_week().week())),
            (self.monthly, "monthly", |time| (time.year(), time.month())),
            (self.yearly, "yearly", |time| (time.year(), 0)),
        ];
        let last = usize::try_from(self.last).unwrap_or(usize::MAX);
        reasons.iter_mut().take(last).for_each(|of| of.push("last"));
        for (count, name, period_of) in rules {
            let (mut left, mut previous) = (count, None);
            for (time, of) in times.iter().zip(&mut reasons) {
                let period = Some(period_of(time));
                if left > 0 && period != previous {
                    of.push(name);
                    left -= 1;
                    previous = period;
                }
            }
        }
        if let (Some(within), Some(newest)) = (self.within, times.first()) {
            let begin = within.before(*newest);
            let kept = times.iter().zip(&mut reasons).filter(|(time, _)| **time >= begin);
            kept.for_each(|(_, of)| of.push("within"));
        }
        reasons
    }
}

fn time_of(sec: i64) -> DateTime<Utc> {
    let end = if sec < 0 { DateTime::<Utc>::MIN_UTC } else { DateTime::<Utc>::MAX_UTC };
    DateTime::from_timestamp(sec, 0).unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sec(text: &str) -> i64 {
        DateTime::parse_from_rfc3339(&format!("{text}:00Z")).unwrap().timestamp()
    }

    fn kept(rules: &KeepRules, times: &[&str]) -> Vec<String> {
        let reasons = rules.reasons(&times.iter().map(|time| sec(time)).collect::<Vec<_>>());
        let shown = times.iter().zip(reasons).filter(|(_, of)| !of.is_empty());
        shown.map(|(time, of)| format!("{time} {}", of.join(","))).collect()
    }

    #[test]
    fn each_rule_keeps_the_newest_of_its_periods() {
        let times = [
            "2026-03-02T10:30",
            "2026-03-02T10:10",
            "2026-03-02T09:00",
            "2026-03-01T23:00",
            "2026-02-20T12:00",
            "2026-01-01T00:00",
            "2025-12-31T23:59",
            "2024-06-01T00:00",
        ];
        let rules = |text: &str, count| {
            let mut rules = KeepRules::default();
            match text {
                "last" => rules.last = count,
                "hourly" => rules.hourly = count,
                "daily" => rules.daily = count,
                "weekly" => rules.weekly = count,
                "monthly" => rules.monthly = count,
                _ => rules.yearly = count,
            }
            rules
        };
        let times_of = |text: &str, count| -> Vec<usize> {
            let lines = kept(&rules(text, count), &times);
            lines.iter().map(|line| times.iter().position(|time| line.starts_with(time)).unwrap()).collect()
        };
        assert_eq!(times_of("last", 2), [0, 1]);
        assert_eq!(times_of("hourly", 2), [0, 2]);
        assert_eq!(times_of("hourly", 3), [0, 2, 3]);
        assert_eq!(times_of("daily", 3), [0, 3, 4]);
        // 2026-03-01 is a Sunday; 2025-12-31 and 2026-01-01 are in one ISO week.
        assert_eq!(times_of("weekly", 9), [0, 3, 4, 5, 7]);
        assert_eq!(times_of("monthly", 4), [0, 4, 5, 6]);
        assert_eq!(times_of("yearly", 9), [0, 6, 7]);
        assert!(times_of("last", 0).is_empty());
        let both = KeepRules { last: 1, yearly: 2, ..KeepRules::default() };
        assert_eq!(kept(&both, &times), ["2026-03-02T10:30 last,yearly", "2025-12-31T23:59 yearly"]);
        let within = KeepRules { within: Some("1m1d2h".parse().unwrap()), ..KeepRules::default() };
        assert_eq!(kept(&within, &times).len(), 5);
    }

    #[test]
    fn lengths_of_time_are_read() {
        for wrong in ["", "1", "d", "1x", "0d", "1d 2h", "99999999999d", "1ä"] {
            assert!(wrong.parse::<KeepWithin>().is_err(), "{wrong}");
        }
        let far: KeepWithin = "4000000000y".parse().unwrap();
        assert_eq!(far.before(time_of(0)), DateTime::<Utc>::MIN_UTC);
        assert_eq!(time_of(i64::MAX), DateTime::<Utc>::MAX_UTC);
    }
}
