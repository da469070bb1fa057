//! Samples as a picture: a strip of dots for each figure, on one logarithmic axis.
//!
//! A table of percentiles hides whether there are two kinds of samples or one with a long tail. Written
//! by hand: it is a few dozen lines, and a plotting crate is a few dozen crates.

use std::fmt::Write;

use super::report::Figure;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 60.0;
const STRIP: f64 = 46.0;

/// The document. Figures that are no times are left out.
pub(super) fn svg(title: &str, figures: &[Figure]) -> String {
    let shown: Vec<&Figure> = figures.iter().filter(|figure| figure.unit == "ms").collect();
    let all = || shown.iter().flat_map(|figure| figure.sorted.iter().copied());
    let low = all().fold(f64::INFINITY, f64::min).clamp(0.1, 1e6).log10().floor();
    let high = all().fold(1.0, f64::max).log10().ceil().max(low + 1.0);
    let x = |ms: f64| {
        let part = (ms.max(1e-3).log10() - low) / (high - low);
        LEFT + part.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    };
    let bottom = TOP + STRIP * shown.len() as f64;
    let height = bottom + 40.0;
    let mut text = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' \
         font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' \
         fill='white'/>\n<text x='20' y='28' font-size='14'>{}</text>\n",
        escaped(title)
    );
    for decade in (low as i32)..=(high as i32) {
        let (ms, at) = (10_f64.powi(decade), x(10_f64.powi(decade)));
        line(&mut text, (at, TOP - 10.0), (at, bottom), "#ddd");
        let y = bottom + 18.0;
        let _ = writeln!(text, "<text x='{at:.1}' y='{y}' text-anchor='middle'>{ms} ms</text>");
    }
    for (number, figure) in shown.into_iter().enumerate() {
        let middle = TOP + STRIP * (number as f64 + 0.5);
        let (p50, p99, max) = (figure.at(0.50), figure.at(0.99), figure.at(1.0));
        let _ = writeln!(
            text,
            "<text x='20' y='{:.1}'>{}</text><text x='20' y='{:.1}' fill='#777' \
             font-size='10'>p50 {p50:.1}  p99 {p99:.1}  max {max:.1}</text>",
            middle - 3.0,
            escaped(&figure.name),
            middle + 10.0
        );
        for (place, sample) in figure.sorted.iter().enumerate() {
            // Spread over the strip, so that equal samples show how many they are.
            let y = middle + ((place * 7) % 21) as f64 - 10.0;
            let at = x(*sample);
            let _ = writeln!(
                text,
                "<circle cx='{at:.1}' cy='{y:.1}' r='2.2' fill='#2a6' fill-opacity='0.5'/>"
            );
        }
        for (ms, colour) in [(p50, "#036"), (p99, "#c30")] {
            line(&mut text, (x(ms), middle - 16.0), (x(ms), middle + 16.0), colour);
        }
    }
    text + "</svg>\n"
}

fn line(text: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "<line x1='{x1:.1}' y1='{y1:.1}' x2='{x2:.1}' y2='{y2:.1}' stroke='{colour}'/>"
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(name: &str, unit: &'static str, sorted: Vec<f64>) -> Figure {
        Figure { name: name.to_owned(), unit, sorted }
    }

    #[test]
    fn l6_every_sample_is_a_dot_inside_the_picture() {
        let figures = [
            figure("holder <1>", "ms", vec![0.0, 3.0, 30.0, 935.0]),
            figure("rate", "1/s", vec![7.0]),
        ];
        let text = svg("a & b", &figures);
        assert_eq!(text.matches("<circle").count(), 4);
        assert!(text.contains("a &amp; b") && text.contains("holder &lt;1&gt;"));
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert!(text.contains(">1000 ms<") && !text.contains("rate"));
        let places = text.split("cx='").skip(1).map(|rest| rest.split('\'').next().unwrap());
        let places: Vec<f64> = places.map(|place| place.parse().unwrap()).collect();
        assert!(places.iter().all(|x| (LEFT..=WIDTH - RIGHT).contains(x)), "{places:?}");
        assert!(places.is_sorted());
        // Nothing measured is no reason to fail.
        assert!(svg("nothing", &[]).contains("nothing"));
    }
}
