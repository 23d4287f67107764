//! The value of an option `--sort`, as in btrfs-progs: names of columns with commas between them.

use std::cmp::Ordering;

/// Columns to sort by, each ascending or descending.
#[derive(Clone, Debug)]
pub(crate) struct Sort<C>(Vec<(C, bool)>);

impl<C: Copy> Sort<C> {
    /// Parses names of `columns`. After `-`, a column is sorted in descending order.
    ///
    /// # Errors
    /// Fails if a name is not in `columns`; the message lists these names.
    pub(crate) fn parse(text: &str, columns: &[(&str, C)]) -> Result<Self, String> {
        let column = |word: &str| {
            let (descends, name) = match word.strip_prefix('-') {
                Some(name) => (true, name),
                None => (false, word.strip_prefix('+').unwrap_or(word)),
            };
            match columns.iter().find(|(known, _)| *known == name) {
                Some((_, column)) => Ok((*column, descends)),
                None => Err(format!("no column '{name}'; expected {}", alternatives(columns))),
            }
        };
        text.split(',').map(column).collect::<Result<_, _>>().map(Self)
    }

    /// Compares two lines. `by` compares them by one column, in ascending order.
    pub(crate) fn compare(&self, by: impl Fn(C) -> Ordering) -> Ordering {
        let order = |(column, descends): &(C, bool)| if *descends { by(*column).reverse() } else { by(*column) };
        self.0.iter().map(order).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }
}

fn alternatives<C>(columns: &[(&str, C)]) -> String {
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_columns_decide_where_earlier_ones_are_equal() {
        let columns = [("one", 0), ("two", 1), ("three", 2)];
        let sort = Sort::parse("+two,-one", &columns).unwrap();
        let compare = |a: [u32; 3], b: [u32; 3]| sort.compare(|column: usize| a[column].cmp(&b[column]));
        assert_eq!(compare([1, 1, 0], [0, 2, 0]), Ordering::Less);
        assert_eq!(compare([1, 1, 0], [0, 1, 0]), Ordering::Less);
        assert_eq!(compare([1, 1, 0], [1, 1, 9]), Ordering::Equal);
        let wrong = Sort::parse("one,four", &columns).unwrap_err();
        assert_eq!(wrong, "no column 'four'; expected one, two or three");
    }
}
